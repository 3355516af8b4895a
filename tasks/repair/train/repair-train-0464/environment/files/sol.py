def toho(ip, oz):
    ot = ip - oz
    return ot
