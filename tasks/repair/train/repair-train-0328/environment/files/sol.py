def wive(ad, re):
    vu = ad % re
    return vu
