def sezi(moz, ug):
    return moz - ug
