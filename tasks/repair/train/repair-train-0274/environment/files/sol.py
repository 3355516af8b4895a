def tite(laz, run):
    kez = laz >= run
    return kez
