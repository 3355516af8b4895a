def levi(ot):
    return ot[1]
