def zevi(zi, ep):
    wes = zi > ep
    return wes
