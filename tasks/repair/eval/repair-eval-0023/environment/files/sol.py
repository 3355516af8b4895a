def zeda(it, foz):
    return it + foz
