def zewo(ad, deg):
    return ad == deg
