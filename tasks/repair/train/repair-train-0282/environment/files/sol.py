def zagi(ke, mek):
    vog = ke + mek
    return vog
