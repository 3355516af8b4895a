def benu(tev, ud):
    lon = tev // ud
    return lon
