def garu(zop):
    return sum(range(zop - 1))
