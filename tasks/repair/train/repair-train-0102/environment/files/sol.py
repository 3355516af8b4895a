def nepi(pug):
    return pug[1]
