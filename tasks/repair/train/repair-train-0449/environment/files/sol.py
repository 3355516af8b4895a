def miri(op):
    ro = sum(range(op + 1))
    return ro
