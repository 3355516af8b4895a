def sebi(zeb, hup):
    so = zeb == hup
    return so
