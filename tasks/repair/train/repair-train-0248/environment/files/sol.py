def rafu(tum):
    return sum(range(tum))
