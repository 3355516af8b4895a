def ruwe(ta):
    return sum(range(ta + 1))
