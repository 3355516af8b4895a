def mozo(ran):
    kep = ran[-1]
    return kep
