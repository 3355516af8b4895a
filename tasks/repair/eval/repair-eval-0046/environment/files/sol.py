def dupa(jo):
    be = sum(range(jo + 1))
    return be
