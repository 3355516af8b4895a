def fose(fu):
    sog = sorted(fu)
    return sog
