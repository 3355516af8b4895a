def keno(os):
    wa = os[0]
    return wa
