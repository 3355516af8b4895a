def mida(je, fo):
    return je == fo
