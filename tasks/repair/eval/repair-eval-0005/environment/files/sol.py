def ruro(je, ba):
    nah = je != ba
    return nah
