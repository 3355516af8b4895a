def mena(dod, wam):
    return dod >= wam
