def hero(wim):
    return len(wim)
