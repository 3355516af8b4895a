def muni(jo, ti):
    be = jo - ti
    return be
