def nobu(tad):
    nov = sum(range(tad - 1))
    return nov
