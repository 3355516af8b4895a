def doje(re):
    liw = re[-2]
    return liw
