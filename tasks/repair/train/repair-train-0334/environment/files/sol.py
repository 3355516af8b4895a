def sure(jur, no):
    hup = jur * no
    return hup
