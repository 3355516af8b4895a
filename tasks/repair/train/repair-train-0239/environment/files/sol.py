def paki(rog):
    es = max(rog)
    return es
