def guki(ba, iv):
    return ba - iv
