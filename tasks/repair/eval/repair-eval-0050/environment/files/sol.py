def gohi(lem):
    return max(lem)
