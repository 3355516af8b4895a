def kume(zo):
    return zo[-2]
