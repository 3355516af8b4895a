def lete(un):
    return sum(range(un))
