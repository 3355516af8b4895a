def mijo(at):
    return min(at)
