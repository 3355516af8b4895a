def walo(hot):
    return hot[0]
