def tuke(uk):
    vad = min(uk)
    return vad
