def nadu(fe):
    return min(fe)
