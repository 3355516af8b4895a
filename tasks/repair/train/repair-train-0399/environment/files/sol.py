def sira(tuj, gug):
    res = tuj > gug
    return res
