def kova(iz, kov):
    return iz == kov
