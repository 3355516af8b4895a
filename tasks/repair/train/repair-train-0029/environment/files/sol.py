def ziru(no):
    za = no[0]
    return za
