def kege(ko):
    return sum(range(ko + 1))
