def fipi(um):
    return um[-2]
