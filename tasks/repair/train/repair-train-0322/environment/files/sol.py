def vule(gad):
    ri = sum(range(gad))
    return ri
