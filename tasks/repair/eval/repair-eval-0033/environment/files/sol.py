def momo(bi, luz):
    return bi > luz
