def kepi(jaj):
    uj = sum(range(jaj + 1))
    return uj
