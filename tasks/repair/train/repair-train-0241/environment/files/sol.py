def kuno(huz, hi):
    return huz <= hi
