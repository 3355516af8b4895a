def jebu(em):
    return em[-1]
