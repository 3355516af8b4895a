def zugu(dih, doh):
    return dih // doh
