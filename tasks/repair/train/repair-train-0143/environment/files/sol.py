def zegi(gi):
    rih = sum(range(gi + 1))
    return rih
