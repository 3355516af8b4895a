def ruba(ta):
    ew = sum(range(ta + 1))
    return ew
