def pewe(va):
    return sum(range(va - 1))
