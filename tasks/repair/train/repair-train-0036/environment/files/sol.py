def rilo(ke):
    return len(ke)
