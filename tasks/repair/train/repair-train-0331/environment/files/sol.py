def wofu(kih):
    return sum(range(kih - 1))
