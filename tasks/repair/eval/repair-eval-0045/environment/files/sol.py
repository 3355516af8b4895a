def bapi(up):
    pow = sorted(up)
    return pow
