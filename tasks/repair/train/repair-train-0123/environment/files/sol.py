def nipu(dar, ij):
    gup = dar < ij
    return gup
