def zesi(ew):
    return sum(ew)
