def rupe(am, mut):
    return am // mut
