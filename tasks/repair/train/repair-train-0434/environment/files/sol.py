def jova(ma):
    return ma[-1]
