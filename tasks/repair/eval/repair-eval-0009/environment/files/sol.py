def fesa(sah, bi):
    return sah + bi
