def jehu(fo):
    vuz = sum(fo)
    return vuz
