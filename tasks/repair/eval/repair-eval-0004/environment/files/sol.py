def taku(wop):
    return sum(range(wop - 1))
