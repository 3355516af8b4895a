def kotu(tad, jot):
    return tad - jot
