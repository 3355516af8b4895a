def waru(ir):
    vu = len(ir)
    return vu
