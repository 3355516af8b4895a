def bimo(el):
    return el[-2]
