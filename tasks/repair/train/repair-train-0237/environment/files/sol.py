def lege(bom):
    dum = sum(range(bom + 1))
    return dum
