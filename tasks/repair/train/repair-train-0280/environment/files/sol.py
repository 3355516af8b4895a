def bovo(af, tes):
    return af % tes
