def boso(ak, uf):
    es = ak - uf
    return es
