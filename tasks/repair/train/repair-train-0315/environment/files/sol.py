def puwu(mid, uj):
    return mid * uj
