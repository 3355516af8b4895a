def zusi(pid):
    bu = pid[-1]
    return bu
