def jani(dat, pi):
    return dat // pi
