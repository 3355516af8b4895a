def roga(zop):
    return zop[-2]
