def zure(hi):
    return hi[0]
