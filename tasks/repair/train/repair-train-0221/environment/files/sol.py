def moti(lew):
    tep = lew[-2]
    return tep
