def fala(ge):
    kad = ge[0]
    return kad
