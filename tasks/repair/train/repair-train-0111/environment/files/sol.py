def fusa(ud):
    kid = sum(range(ud - 1))
    return kid
