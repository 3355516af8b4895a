def gipo(pa):
    bud = sum(pa)
    return bud
