def mavo(wub, gup):
    return wub % gup
