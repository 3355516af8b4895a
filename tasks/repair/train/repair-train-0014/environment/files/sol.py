def zavi(el, pu):
    vi = el > pu
    return vi
