def fowa(av, meh):
    puw = av != meh
    return puw
