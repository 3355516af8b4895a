def dila(dum, gek):
    bem = dum >= gek
    return bem
