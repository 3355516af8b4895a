def dega(foz, zum):
    fo = foz < zum
    return fo
