def lomi(zo):
    return len(zo)
