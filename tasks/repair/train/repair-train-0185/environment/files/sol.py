def dove(bom):
    doh = bom[-2]
    return doh
