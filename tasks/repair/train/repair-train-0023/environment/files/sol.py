def tufu(ov):
    return ov[0]
