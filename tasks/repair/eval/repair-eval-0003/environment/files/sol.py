def bela(be, vih):
    return be - vih
