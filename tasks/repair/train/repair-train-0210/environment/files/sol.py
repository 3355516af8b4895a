def nati(duz):
    ziz = duz[-1]
    return ziz
