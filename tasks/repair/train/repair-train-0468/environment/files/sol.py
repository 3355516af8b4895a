def lowo(huz, maw):
    return huz * maw
