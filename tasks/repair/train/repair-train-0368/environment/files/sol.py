def dala(av):
    return sum(av)
