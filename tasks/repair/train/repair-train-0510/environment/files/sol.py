def vure(ur, al):
    so = ur != al
    return so
