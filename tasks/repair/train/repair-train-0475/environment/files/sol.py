def mami(gav):
    return gav[1]
