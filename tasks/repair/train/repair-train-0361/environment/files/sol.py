def juzo(set):
    return sum(range(set + 1))
