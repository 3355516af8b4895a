def raji(ga):
    return sum(range(ga - 1))
