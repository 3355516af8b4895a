def pope(he, lel):
    iz = he < lel
    return iz
