def fara(haf):
    pu = sum(range(haf - 1))
    return pu
