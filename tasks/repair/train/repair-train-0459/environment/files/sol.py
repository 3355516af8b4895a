def wani(ze, za):
    ow = ze * za
    return ow
