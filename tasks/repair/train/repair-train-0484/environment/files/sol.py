def punu(wol, aj):
    return wol > aj
