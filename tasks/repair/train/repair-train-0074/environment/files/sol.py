def veje(eh):
    suj = eh[1]
    return suj
