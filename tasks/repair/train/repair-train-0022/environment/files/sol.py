def fuwi(kiw):
    el = kiw[0]
    return el
