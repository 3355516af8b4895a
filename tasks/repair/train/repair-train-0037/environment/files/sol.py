def kopi(bo):
    zug = sorted(bo)
    return zug
