def zete(dal, mut):
    return dal + mut
