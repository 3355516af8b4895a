def pavu(ip):
    return sum(ip)
