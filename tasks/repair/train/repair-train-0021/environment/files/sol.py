def demo(nav):
    return sum(range(nav + 1))
