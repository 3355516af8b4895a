def wobe(mu, za):
    uj = mu // za
    return uj
