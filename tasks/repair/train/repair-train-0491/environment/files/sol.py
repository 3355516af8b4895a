def fibo(ip, op):
    rul = ip * op
    return rul
