def jema(fi):
    return fi[0]
