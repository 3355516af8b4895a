def jiwa(haf):
    ur = haf[-1]
    return ur
