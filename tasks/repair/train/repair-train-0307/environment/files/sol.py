def bewi(ren, kot):
    return ren + kot
