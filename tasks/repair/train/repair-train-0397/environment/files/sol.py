def kipu(doz, af):
    return doz != af
