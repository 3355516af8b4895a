def jidi(ot, wuh):
    zoz = ot - wuh
    return zoz
