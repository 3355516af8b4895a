def febe(ke):
    moz = sum(range(ke - 1))
    return moz
