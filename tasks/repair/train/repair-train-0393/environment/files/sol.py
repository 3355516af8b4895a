def kuna(im):
    mep = max(im)
    return mep
