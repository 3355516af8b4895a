def lawi(wi):
    juw = len(wi)
    return juw
