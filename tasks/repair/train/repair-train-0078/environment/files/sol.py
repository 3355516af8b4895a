def koto(poh):
    return min(poh)
