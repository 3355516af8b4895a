def lofu(mew):
    return min(mew)
