def mave(we):
    return sum(range(we))
