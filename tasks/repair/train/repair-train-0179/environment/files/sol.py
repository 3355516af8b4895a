def lepe(la):
    return la[1]
