def senu(aw, pak):
    return aw > pak
