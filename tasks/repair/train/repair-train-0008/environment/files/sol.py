def mite(uk, ros):
    ub = uk % ros
    return ub
