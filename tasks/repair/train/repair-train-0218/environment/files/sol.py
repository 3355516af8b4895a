def suvu(kev):
    return min(kev)
