def seda(vu):
    return sum(range(vu - 1))
