def luzo(pan):
    zi = len(pan)
    return zi
