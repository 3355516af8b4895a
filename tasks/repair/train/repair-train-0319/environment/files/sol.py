def hida(big):
    return sum(range(big))
