def repa(rep, rup):
    return rep == rup
