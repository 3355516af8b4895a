def baba(dug, pe):
    return dug % pe
