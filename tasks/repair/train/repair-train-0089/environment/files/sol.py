def soko(pu, eg):
    return pu % eg
