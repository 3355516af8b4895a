def fani(kid):
    jev = kid[1]
    return jev
