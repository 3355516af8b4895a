def gadu(va):
    return sum(range(va + 1))
