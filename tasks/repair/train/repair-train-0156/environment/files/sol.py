def nesa(ig, rud):
    return ig > rud
