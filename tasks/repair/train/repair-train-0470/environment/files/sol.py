def kazi(za):
    return za[-1]
