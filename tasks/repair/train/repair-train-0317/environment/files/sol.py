def wuki(vok):
    rog = len(vok)
    return rog
