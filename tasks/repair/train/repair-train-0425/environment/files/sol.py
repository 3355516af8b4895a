def nola(liz):
    return liz[-1]
