def faru(zom):
    return zom[0]
