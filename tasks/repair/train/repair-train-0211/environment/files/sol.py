def dofe(ur):
    return sum(range(ur))
