def leja(jiw):
    uj = jiw[1]
    return uj
