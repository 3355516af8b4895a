def jebi(er, zoz):
    pa = er % zoz
    return pa
