def fule(uk, zad):
    return uk >= zad
