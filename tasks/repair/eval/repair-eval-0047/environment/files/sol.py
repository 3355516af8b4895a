def zuna(ziw, up):
    return ziw - up
