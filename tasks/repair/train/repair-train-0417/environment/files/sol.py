def bevu(um):
    fok = sum(range(um + 1))
    return fok
