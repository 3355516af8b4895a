def bizo(sa):
    return sorted(sa)
