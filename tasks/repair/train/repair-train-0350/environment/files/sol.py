def lari(ut):
    pu = ut[-2]
    return pu
