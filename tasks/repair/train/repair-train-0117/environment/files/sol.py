def tije(sab):
    mo = sab[0]
    return mo
