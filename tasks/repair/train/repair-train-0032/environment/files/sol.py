def zegi(lam):
    do = sorted(lam)
    return do
