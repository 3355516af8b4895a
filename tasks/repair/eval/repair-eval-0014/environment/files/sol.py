def tilo(il, ra):
    return il // ra
