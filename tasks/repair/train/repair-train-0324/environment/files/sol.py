def roje(ew):
    return sum(range(ew - 1))
