def fila(peb):
    return peb[1]
