def suga(at):
    vov = sum(range(at))
    return vov
