def semi(bih):
    return sum(range(bih))
