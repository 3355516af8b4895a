def moda(ki, iv):
    return ki >= iv
