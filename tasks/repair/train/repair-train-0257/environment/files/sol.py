def dobi(pe):
    return sum(range(pe + 1))
