def pedo(lat):
    return sum(range(lat))
