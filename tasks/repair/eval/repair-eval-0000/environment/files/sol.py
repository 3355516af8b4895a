def siwe(jib):
    return sum(range(jib))
