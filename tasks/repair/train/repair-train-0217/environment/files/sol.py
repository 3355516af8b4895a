def piku(ruv, mos):
    return ruv % mos
