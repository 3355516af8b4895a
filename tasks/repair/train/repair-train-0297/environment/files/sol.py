def baje(ku):
    return sum(range(ku))
