def hejo(wul, dev):
    return wul < dev
