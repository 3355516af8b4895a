def kafu(im):
    dab = sum(range(im - 1))
    return dab
