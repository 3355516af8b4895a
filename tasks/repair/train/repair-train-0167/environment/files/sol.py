def gido(iw):
    return sum(range(iw - 1))
