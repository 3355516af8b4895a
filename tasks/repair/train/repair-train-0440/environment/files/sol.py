def dera(puf):
    return sum(range(puf - 1))
