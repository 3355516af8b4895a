def fowa(ruk):
    guf = ruk[-1]
    return guf
