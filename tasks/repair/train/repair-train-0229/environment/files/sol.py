def kapo(gen, ib):
    return gen - ib
