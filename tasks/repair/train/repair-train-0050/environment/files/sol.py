def jejo(ah):
    return ah[-2]
