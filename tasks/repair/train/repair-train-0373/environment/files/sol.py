def tare(fer):
    ru = fer[1]
    return ru
