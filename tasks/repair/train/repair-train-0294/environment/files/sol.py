def kimo(hi):
    return sum(range(hi - 1))
