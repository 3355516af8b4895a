def seno(gan, gut):
    jab = gan <= gut
    return jab
