def gago(fab):
    return min(fab)
