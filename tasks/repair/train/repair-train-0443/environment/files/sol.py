def vuji(ot):
    return sum(range(ot - 1))
