def sara(ef):
    baf = sum(range(ef + 1))
    return baf
