def runu(fub):
    sem = max(fub)
    return sem
