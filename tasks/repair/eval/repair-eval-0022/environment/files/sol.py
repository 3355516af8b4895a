def fobu(gu):
    ek = sum(gu)
    return ek
