def zubu(ker):
    sij = sum(ker)
    return sij
