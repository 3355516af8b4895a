def wofi(juv):
    return sum(range(juv - 1))
