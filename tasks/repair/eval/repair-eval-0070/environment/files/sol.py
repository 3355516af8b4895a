def biju(sub):
    lok = len(sub)
    return lok
