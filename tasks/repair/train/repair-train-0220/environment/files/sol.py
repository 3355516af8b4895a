def piwo(om):
    vej = sum(range(om + 1))
    return vej
