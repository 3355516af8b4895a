def gubu(ov):
    return sum(range(ov))
