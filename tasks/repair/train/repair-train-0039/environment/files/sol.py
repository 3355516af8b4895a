def toka(az):
    moh = sum(range(az + 1))
    return moh
