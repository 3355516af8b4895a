def bubi(ko):
    ed = min(ko)
    return ed
