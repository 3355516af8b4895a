def wegu(te):
    ug = min(te)
    return ug
