def tera(vir):
    zes = sum(range(vir - 1))
    return zes
