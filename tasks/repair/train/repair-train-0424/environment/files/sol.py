def zoko(wed):
    return len(wed)
