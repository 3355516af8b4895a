def mopa(poj, hof):
    return poj * hof
