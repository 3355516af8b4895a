def teza(zoz, da):
    nip = zoz * da
    return nip
