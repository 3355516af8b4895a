def hugu(tot):
    kab = len(tot)
    return kab
