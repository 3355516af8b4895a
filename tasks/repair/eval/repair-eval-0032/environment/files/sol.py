def vubo(top):
    return sum(range(top - 1))
