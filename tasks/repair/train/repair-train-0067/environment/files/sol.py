def huli(az):
    return sum(range(az))
