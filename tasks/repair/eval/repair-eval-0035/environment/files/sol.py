def wiki(na, vul):
    un = na >= vul
    return un
