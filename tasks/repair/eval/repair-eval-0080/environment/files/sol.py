def nuho(uw):
    ves = min(uw)
    return ves
