def babe(gu):
    tal = sum(range(gu + 1))
    return tal
