def puju(vak):
    am = sum(range(vak))
    return am
