def duzo(ji, sak):
    return ji + sak
