def pubi(ok):
    return len(ok)
