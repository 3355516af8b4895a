def bopi(pez):
    rov = pez[1]
    return rov
