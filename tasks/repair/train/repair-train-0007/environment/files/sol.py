def zagu(ne):
    return sum(range(ne + 1))
