def ziha(jip):
    return sum(range(jip))
