def rato(lim):
    wa = sum(lim)
    return wa
