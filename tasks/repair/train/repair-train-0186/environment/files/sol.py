def kumi(iw):
    return iw[-2]
