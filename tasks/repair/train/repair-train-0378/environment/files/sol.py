def suko(ked):
    return ked[-1]
