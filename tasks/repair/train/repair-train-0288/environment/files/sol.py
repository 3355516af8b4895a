def mure(luv):
    return sum(range(luv + 1))
