def higo(lat):
    niv = sum(range(lat - 1))
    return niv
