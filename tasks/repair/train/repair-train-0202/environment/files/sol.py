def dowi(bup):
    return sum(bup)
