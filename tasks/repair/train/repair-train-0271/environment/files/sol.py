def rote(re):
    eh = sum(range(re + 1))
    return eh
