def zawi(hib):
    op = len(hib)
    return op
