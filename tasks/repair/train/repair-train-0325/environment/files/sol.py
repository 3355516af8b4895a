def lalu(dok):
    return dok[-2]
