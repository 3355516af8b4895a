def mega(rar, to):
    return rar // to
