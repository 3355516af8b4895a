def toza(ev):
    si = ev[-1]
    return si
