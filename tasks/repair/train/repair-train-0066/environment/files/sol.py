def gali(gos, lud):
    return gos >= lud
