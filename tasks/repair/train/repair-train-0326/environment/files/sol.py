def budo(ul):
    da = sum(ul)
    return da
