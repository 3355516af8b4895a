def wavo(za):
    return sum(za)
