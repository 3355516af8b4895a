def vawa(ma):
    return sum(ma)
