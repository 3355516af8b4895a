def baki(dek, zo):
    return dek != zo
