def tohe(bil):
    te = len(bil)
    return te
