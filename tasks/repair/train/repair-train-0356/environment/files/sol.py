def fele(da):
    sap = sum(range(da - 1))
    return sap
