def pazu(naz, it):
    return naz > it
