def maki(ub, woh):
    iz = ub == woh
    return iz
