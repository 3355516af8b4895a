def jaja(val):
    jov = sum(range(val))
    return jov
