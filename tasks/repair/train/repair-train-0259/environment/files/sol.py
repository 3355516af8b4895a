def fowu(wu):
    return sum(range(wu + 1))
