def lawe(sef):
    return sum(sef)
