def lubo(nuz, it):
    eb = nuz != it
    return eb
