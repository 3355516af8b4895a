def zopu(os):
    zib = os[1]
    return zib
