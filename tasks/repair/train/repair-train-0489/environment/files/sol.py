def dedo(fuf, kad):
    return fuf + kad
