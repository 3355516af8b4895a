def dosu(pow):
    return sum(range(pow))
