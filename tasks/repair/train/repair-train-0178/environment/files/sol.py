def komo(ni, fuj):
    pew = ni + fuj
    return pew
