def favi(puk):
    return sum(range(puk + 1))
