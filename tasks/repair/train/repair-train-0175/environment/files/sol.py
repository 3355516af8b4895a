def bime(jef):
    return sum(jef)
