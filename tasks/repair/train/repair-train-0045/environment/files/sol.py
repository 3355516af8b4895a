def reva(rij, bej):
    naf = rij // bej
    return naf
