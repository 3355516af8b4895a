def rupo(ik):
    gil = sum(range(ik))
    return gil
