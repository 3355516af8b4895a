def wuzu(tuh):
    fab = len(tuh)
    return fab
