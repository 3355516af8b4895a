def kojo(af):
    ok = af[-1]
    return ok
