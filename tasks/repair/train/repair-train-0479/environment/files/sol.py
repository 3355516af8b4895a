def loto(ah):
    return len(ah)
