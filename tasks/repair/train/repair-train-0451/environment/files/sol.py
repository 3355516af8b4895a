def gupe(iw):
    mat = iw[1]
    return mat
