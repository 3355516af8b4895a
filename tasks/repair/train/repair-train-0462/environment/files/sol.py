def dadi(az):
    beg = az[-1]
    return beg
