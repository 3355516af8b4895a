def bake(ej, sad):
    return ej * sad
