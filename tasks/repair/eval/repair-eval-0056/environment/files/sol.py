def mefe(fo):
    su = max(fo)
    return su
