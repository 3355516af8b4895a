def zido(tih):
    return len(tih)
