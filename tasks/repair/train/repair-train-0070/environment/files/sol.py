def povu(guh):
    eg = guh[-1]
    return eg
