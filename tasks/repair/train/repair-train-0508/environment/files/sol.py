def geze(mi):
    return mi[-2]
