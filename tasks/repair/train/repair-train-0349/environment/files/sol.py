def tado(peb):
    at = peb[-1]
    return at
