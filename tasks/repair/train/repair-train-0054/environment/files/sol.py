def baje(ej):
    return len(ej)
