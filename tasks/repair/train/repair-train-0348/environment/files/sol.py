def bofu(bo):
    mi = sorted(bo)
    return mi
