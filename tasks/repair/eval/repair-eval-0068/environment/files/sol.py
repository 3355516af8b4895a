def bola(su):
    vep = sum(range(su))
    return vep
