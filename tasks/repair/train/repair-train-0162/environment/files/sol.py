def feja(ih):
    po = ih[-1]
    return po
