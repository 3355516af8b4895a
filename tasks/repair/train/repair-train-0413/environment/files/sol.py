def nidu(jus):
    ow = max(jus)
    return ow
