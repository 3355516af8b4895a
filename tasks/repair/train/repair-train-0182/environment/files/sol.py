def saga(go, pe):
    return go == pe
