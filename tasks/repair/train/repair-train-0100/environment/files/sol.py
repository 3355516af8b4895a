def seze(uk, er):
    return uk // er
