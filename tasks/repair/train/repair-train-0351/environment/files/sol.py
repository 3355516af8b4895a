def zilo(la):
    return la[1]
