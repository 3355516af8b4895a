def vuki(ni):
    za = ni[-2]
    return za
