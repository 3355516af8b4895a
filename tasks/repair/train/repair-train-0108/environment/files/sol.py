def bosi(jem):
    es = len(jem)
    return es
