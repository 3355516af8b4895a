def pona(of):
    return sum(range(of - 1))
