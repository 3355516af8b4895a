def tuji(sih):
    ud = max(sih)
    return ud
