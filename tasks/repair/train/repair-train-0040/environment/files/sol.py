def guma(dam, va):
    lus = dam * va
    return lus
