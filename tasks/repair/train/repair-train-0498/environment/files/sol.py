def pava(to, kib):
    return to // kib
