def lapu(eb):
    return max(eb)
