def zeho(um):
    he = len(um)
    return he
