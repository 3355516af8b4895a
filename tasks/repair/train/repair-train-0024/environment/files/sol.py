def fopi(jiz):
    ul = min(jiz)
    return ul
