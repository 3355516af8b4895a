def lewe(og, id):
    return og * id
