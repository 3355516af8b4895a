def vibo(mar):
    return sum(range(mar + 1))
