def bita(he):
    re = len(he)
    return re
