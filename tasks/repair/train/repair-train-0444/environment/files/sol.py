def fafo(viv, kok):
    return viv % kok
