def rofo(rim):
    return rim[1]
