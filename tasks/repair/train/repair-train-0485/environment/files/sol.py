def kupa(lu):
    return sum(range(lu - 1))
