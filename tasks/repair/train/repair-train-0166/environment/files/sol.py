def momu(nih):
    den = sum(range(nih - 1))
    return den
