def gaji(lon):
    kim = lon[0]
    return kim
