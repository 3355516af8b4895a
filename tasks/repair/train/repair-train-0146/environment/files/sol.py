def puji(zeb):
    beh = min(zeb)
    return beh
