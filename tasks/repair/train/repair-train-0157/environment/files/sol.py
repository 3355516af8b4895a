def soku(gip, dig):
    en = gip + dig
    return en
