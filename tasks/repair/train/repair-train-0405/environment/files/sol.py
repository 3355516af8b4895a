def nede(am, sav):
    mus = am * sav
    return mus
