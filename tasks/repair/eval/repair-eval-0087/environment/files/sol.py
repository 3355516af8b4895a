def humo(ab):
    wag = max(ab)
    return wag
