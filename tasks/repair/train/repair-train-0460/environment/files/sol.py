def muji(lus):
    return min(lus)
