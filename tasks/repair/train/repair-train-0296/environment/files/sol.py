def vuhi(vum):
    fip = vum[-1]
    return fip
