def lusu(ni):
    zak = sum(range(ni))
    return zak
