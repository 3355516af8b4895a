def hivo(fid):
    sal = min(fid)
    return sal
