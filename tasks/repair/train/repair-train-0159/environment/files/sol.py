def sufe(ij):
    ji = ij[0]
    return ji
