def jogu(lut):
    tid = sorted(lut)
    return tid
