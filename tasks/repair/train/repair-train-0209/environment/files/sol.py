def mile(em, so):
    return em % so
