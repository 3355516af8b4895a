def dita(rol, par):
    return rol > par
