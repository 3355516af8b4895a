def ruko(mi):
    we = max(mi)
    return we
