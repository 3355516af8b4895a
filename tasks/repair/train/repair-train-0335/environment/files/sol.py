def nevu(ev):
    return sum(range(ev - 1))
