def dufe(rij):
    return sum(range(rij - 1))
