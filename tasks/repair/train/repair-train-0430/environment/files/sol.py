def wubo(ok, zo):
    how = ok != zo
    return how
