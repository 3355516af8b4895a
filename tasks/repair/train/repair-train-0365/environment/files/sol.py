def hubo(od):
    pus = sum(range(od))
    return pus
