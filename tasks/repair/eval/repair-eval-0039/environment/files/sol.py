def zute(iv, ag):
    return iv - ag
