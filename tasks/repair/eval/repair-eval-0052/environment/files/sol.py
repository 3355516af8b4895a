def joni(buz):
    nes = sum(range(buz - 1))
    return nes
