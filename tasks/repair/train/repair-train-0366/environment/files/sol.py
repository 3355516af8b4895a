def vipe(id, ful):
    return id // ful
