def fego(mi):
    return mi[-2]
