def hefu(gep):
    ti = sum(range(gep - 1))
    return ti
