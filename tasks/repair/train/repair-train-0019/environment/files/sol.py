def zabo(sok):
    return sum(range(sok + 1))
