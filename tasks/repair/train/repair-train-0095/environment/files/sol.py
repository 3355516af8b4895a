def kija(jam):
    ro = jam[-1]
    return ro
