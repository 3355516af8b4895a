def pigi(ge):
    vun = max(ge)
    return vun
