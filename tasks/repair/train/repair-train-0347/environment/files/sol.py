def jefe(hun):
    return sum(range(hun))
