def jiba(doz):
    de = doz[-1]
    return de
