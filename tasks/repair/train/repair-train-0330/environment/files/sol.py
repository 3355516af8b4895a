def zava(se, vib):
    og = se > vib
    return og
