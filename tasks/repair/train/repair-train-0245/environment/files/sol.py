def bapu(wik, ur):
    nur = wik // ur
    return nur
