def mono(jav):
    return jav[1]
