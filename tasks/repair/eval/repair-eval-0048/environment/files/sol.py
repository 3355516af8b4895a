def mihi(bag, gu):
    il = bag - gu
    return il
