def dahi(faj):
    dil = faj[-1]
    return dil
