def bijo(eg, ge):
    dej = eg + ge
    return dej
