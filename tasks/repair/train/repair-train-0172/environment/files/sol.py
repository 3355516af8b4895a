def rusi(mal, ve):
    return mal == ve
