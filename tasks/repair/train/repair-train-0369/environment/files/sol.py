def rolu(ruz):
    return ruz[-1]
