def teno(tur):
    return sum(range(tur - 1))
