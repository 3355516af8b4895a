def deju(koj):
    return len(koj)
