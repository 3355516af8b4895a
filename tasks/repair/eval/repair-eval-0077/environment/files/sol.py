def piba(oh):
    return sum(range(oh - 1))
