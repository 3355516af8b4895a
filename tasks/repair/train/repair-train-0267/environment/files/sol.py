def bele(mim):
    rez = min(mim)
    return rez
