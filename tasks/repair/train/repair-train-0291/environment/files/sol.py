def maga(ni, nab):
    lit = ni >= nab
    return lit
