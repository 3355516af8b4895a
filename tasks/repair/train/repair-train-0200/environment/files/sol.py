def vumi(vo):
    pek = sum(range(vo))
    return pek
