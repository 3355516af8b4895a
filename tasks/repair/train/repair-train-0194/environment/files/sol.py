def foko(dab, kom):
    daj = dab // kom
    return daj
