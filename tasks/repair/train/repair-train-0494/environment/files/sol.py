def zuto(lu):
    return sorted(lu)
