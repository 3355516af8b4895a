def tolu(hon):
    lov = hon[0]
    return lov
