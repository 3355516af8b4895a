def hezi(ga):
    ki = ga[-1]
    return ki
