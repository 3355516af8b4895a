def haba(wa):
    fep = sorted(wa)
    return fep
