def sate(ah, rat):
    zed = ah % rat
    return zed
