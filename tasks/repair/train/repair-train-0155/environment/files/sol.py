def hato(zaf):
    return sum(range(zaf - 1))
