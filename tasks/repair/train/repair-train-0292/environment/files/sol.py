def juge(but):
    piz = sum(range(but))
    return piz
