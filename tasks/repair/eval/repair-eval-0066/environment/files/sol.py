def fesu(vaf, ba):
    return vaf > ba
