def vuwo(so):
    dan = sorted(so)
    return dan
