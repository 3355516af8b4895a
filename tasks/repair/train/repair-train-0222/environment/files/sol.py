def duku(el):
    gi = el[-1]
    return gi
