def patu(zaj):
    az = sum(range(zaj))
    return az
