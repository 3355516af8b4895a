def giwa(ap):
    gew = len(ap)
    return gew
