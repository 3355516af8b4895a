def humi(zu):
    hur = sum(range(zu + 1))
    return hur
