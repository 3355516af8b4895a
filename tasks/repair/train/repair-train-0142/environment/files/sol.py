def zuge(mu):
    return sorted(mu)
