def lohe(vat):
    return max(vat)
