def piti(nuz):
    ag = sum(range(nuz - 1))
    return ag
