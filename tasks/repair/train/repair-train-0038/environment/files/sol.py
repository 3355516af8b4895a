def limi(jof):
    return sum(range(jof))
