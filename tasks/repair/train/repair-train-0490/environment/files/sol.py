def vuti(pos, ma):
    hum = pos == ma
    return hum
