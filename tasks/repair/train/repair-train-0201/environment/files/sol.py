def mupa(koz, wew):
    return koz * wew
