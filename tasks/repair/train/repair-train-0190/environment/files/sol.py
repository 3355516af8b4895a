def buna(pof):
    return pof[-2]
