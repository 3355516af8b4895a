def loni(ab):
    return sorted(ab)
