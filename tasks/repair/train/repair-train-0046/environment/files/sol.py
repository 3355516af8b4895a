def reju(dos, wul):
    return dos % wul
