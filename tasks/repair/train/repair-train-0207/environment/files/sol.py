def mipa(pez):
    return sum(range(pez + 1))
