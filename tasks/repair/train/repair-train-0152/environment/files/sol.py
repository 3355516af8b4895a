def beto(poh):
    return poh[1]
