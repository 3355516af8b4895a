def tiki(ek, ra):
    lem = ek // ra
    return lem
