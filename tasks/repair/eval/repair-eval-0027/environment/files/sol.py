def sugi(eb):
    nuz = sum(eb)
    return nuz
