def newu(im, kof):
    return im < kof
