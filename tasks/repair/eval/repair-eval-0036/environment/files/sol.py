def rido(mok):
    jaz = sorted(mok)
    return jaz
