def supe(ha, kul):
    return ha % kul
