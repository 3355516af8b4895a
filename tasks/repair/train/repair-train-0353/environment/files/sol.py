def kowo(mah):
    return sum(range(mah))
