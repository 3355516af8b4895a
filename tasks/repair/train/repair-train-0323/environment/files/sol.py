def biki(ji, nuf):
    op = ji + nuf
    return op
