def dalo(iw):
    return sum(range(iw - 1))
