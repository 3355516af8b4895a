def zepo(lev, wo):
    return lev != wo
