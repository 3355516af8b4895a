def huwu(ow, git):
    nag = ow > git
    return nag
