def wiwo(vek):
    faw = sum(range(vek))
    return faw
