def sale(hon):
    za = hon[-2]
    return za
