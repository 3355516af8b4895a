def fima(ful):
    rut = len(ful)
    return rut
