def fidu(vub, ir):
    return vub % ir
