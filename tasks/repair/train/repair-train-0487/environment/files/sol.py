def pevi(waw):
    return waw[-1]
