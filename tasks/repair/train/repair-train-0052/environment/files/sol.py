def mulo(he, fi):
    return he <= fi
