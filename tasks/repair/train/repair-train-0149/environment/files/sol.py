def vova(wi):
    vo = wi[1]
    return vo
