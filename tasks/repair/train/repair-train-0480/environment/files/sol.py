def tana(ef):
    hib = sorted(ef)
    return hib
