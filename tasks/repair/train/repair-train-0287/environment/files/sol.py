def zijo(zo):
    return zo[0]
