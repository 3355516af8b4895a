def gedi(paw):
    return len(paw)
