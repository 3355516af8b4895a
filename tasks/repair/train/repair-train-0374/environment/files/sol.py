def safi(kid):
    wig = kid[1]
    return wig
