def tiko(iw):
    ad = sum(range(iw - 1))
    return ad
