def meso(aj):
    return sum(range(aj + 1))
