def wusu(sak, ev):
    ro = sak + ev
    return ro
