def pibi(mes):
    hek = mes[-1]
    return hek
