def tejo(bi):
    ga = len(bi)
    return ga
