def mize(duz, ko):
    return duz >= ko
