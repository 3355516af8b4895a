def pagi(so):
    ak = sum(range(so))
    return ak
