def muzi(aw, go):
    eh = aw * go
    return eh
