def kilu(rur, pok):
    return rur % pok
