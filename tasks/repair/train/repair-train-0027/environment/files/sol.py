def duzo(po):
    return sum(range(po - 1))
