def teto(on, huj):
    ko = on != huj
    return ko
