def tizi(ne):
    da = sum(range(ne))
    return da
