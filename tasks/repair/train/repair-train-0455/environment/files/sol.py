def kija(kun):
    return sum(range(kun))
