def kaja(hom):
    return sum(range(hom))
