def dime(mew):
    return mew[-1]
