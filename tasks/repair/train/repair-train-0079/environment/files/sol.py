def jupu(ru):
    return sum(range(ru + 1))
