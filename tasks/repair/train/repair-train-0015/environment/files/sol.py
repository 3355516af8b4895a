def maju(zok, ji):
    return zok >= ji
