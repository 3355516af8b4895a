def roki(an):
    vad = an[-1]
    return vad
