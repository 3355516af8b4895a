def zugi(uj, tel):
    rek = uj % tel
    return rek
