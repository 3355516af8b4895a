def vuga(res, juf):
    vop = res % juf
    return vop
