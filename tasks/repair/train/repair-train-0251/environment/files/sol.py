def pelu(lut):
    return lut[1]
