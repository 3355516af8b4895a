def niva(mir):
    ka = sum(range(mir + 1))
    return ka
