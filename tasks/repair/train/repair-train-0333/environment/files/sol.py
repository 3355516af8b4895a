def pona(te):
    lo = te[1]
    return lo
