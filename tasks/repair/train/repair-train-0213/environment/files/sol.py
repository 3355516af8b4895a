def woti(an):
    woh = sum(range(an))
    return woh
