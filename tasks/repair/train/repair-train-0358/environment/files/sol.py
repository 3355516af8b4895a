def wuta(jeb):
    uj = len(jeb)
    return uj
