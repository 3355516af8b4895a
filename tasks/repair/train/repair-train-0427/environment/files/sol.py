def weda(er):
    lon = er[-1]
    return lon
