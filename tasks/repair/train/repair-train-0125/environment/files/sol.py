def doku(vaz):
    return sum(range(vaz - 1))
