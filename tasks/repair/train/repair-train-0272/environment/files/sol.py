def geme(liv, luw):
    iw = liv % luw
    return iw
