def nale(doz):
    return sum(range(doz))
