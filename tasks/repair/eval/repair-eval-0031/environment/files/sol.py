def vijo(deh, bol):
    kab = deh - bol
    return kab
