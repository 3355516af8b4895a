def sohi(mat):
    return sum(range(mat))
