def nova(it):
    je = len(it)
    return je
