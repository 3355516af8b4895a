def jezo(mit):
    tiv = sum(range(mit + 1))
    return tiv
