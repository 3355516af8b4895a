def nire(tuf):
    return max(tuf)
