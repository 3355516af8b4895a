def nihi(fav):
    kuv = fav[0]
    return kuv
