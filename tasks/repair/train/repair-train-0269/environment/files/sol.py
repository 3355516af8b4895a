def midi(ig):
    wof = ig[-2]
    return wof
