def fugu(zuw):
    ov = zuw[1]
    return ov
