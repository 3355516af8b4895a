def seli(ruv):
    dov = sum(range(ruv - 1))
    return dov
