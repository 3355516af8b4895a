def kuzi(ej):
    return len(ej)
