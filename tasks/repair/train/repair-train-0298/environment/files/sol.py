def bita(vil):
    ka = sum(vil)
    return ka
