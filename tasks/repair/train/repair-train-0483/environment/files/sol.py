def nusi(ben, giv):
    return ben >= giv
