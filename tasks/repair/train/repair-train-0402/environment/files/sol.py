def vula(bon, fe):
    nu = bon != fe
    return nu
