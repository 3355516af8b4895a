def baha(gij):
    return gij[0]
