def rewa(ah):
    return sum(ah)
