def tona(jes):
    zi = max(jes)
    return zi
