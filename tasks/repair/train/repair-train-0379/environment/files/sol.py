def moge(gev, duw):
    return gev * duw
