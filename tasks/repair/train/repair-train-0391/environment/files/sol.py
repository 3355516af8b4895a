def gowe(ap):
    rok = ap[0]
    return rok
