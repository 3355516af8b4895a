def sagi(ow, zup):
    return ow <= zup
