def sato(pib):
    return sum(range(pib - 1))
