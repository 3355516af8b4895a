def vusi(diw, uj):
    return diw < uj
