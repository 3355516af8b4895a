def tato(gop):
    return sum(range(gop))
