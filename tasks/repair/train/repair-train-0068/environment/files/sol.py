def toma(ja):
    at = sum(range(ja))
    return at
