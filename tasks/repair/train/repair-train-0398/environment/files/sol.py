def pija(at, god):
    return at % god
