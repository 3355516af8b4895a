def wamo(ri, feb):
    return ri + feb
