def hake(ug):
    return sum(range(ug))
