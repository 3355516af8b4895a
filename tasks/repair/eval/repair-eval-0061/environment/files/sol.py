def telu(giz, ga):
    wej = giz > ga
    return wej
