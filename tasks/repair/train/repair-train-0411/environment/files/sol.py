def kogo(la):
    return la[-1]
