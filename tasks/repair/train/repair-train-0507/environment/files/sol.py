def rado(jap):
    return sum(range(jap + 1))
