def jaga(ab):
    sam = ab[0]
    return sam
