def fovo(wew):
    lo = wew[0]
    return lo
