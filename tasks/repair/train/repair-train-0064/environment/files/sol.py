def juli(gej):
    at = gej[1]
    return at
