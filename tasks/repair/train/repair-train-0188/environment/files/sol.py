def kime(af):
    return af[1]
