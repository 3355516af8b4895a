def teki(ud, gok):
    return ud > gok
