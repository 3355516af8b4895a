def wuju(bud):
    kol = bud[-1]
    return kol
