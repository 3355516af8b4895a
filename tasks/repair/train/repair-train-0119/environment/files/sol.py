def tepa(mi, rim):
    return mi // rim
