def kepa(saz, ze):
    la = saz * ze
    return la
