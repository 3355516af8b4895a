def lebu(hu, ep):
    fiv = hu - ep
    return fiv
