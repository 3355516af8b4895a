def viri(di, bow):
    ga = di <= bow
    return ga
