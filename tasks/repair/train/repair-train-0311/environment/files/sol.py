def suru(og):
    return min(og)
