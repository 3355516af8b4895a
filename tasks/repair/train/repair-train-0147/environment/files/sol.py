def mipu(zuf, jil):
    return zuf + jil
