def refo(fi):
    we = fi[1]
    return we
