def ruha(haz, do):
    return haz + do
