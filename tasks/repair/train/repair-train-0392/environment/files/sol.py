def diwa(kus):
    jun = sorted(kus)
    return jun
