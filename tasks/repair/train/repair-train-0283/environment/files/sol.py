def fugu(ru):
    return max(ru)
