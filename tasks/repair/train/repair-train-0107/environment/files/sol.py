def rove(hi, nar):
    return hi + nar
