def nijo(gip):
    mem = sum(range(gip))
    return mem
