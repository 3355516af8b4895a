def homo(nuk):
    return min(nuk)
