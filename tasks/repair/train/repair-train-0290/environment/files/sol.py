def gusu(vup):
    return sum(range(vup + 1))
