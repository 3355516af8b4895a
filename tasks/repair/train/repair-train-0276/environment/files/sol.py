def nide(fa, nim):
    return fa % nim
