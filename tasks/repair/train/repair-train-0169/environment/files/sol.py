def ruto(ur):
    rah = ur[0]
    return rah
