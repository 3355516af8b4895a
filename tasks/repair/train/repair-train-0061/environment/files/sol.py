def kune(rof, ur):
    em = rof < ur
    return em
