def hezu(fo):
    fag = sum(range(fo))
    return fag
