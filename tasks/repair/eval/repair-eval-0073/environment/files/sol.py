def foji(ho, ol):
    return ho >= ol
