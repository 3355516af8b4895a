def buve(va):
    zu = sum(range(va + 1))
    return zu
