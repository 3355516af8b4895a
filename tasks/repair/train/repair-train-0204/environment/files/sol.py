def bome(ma):
    soz = sum(range(ma - 1))
    return soz
