def roma(le):
    ka = sum(range(le))
    return ka
