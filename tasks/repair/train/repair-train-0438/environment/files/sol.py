def kowi(aw):
    dej = sum(range(aw + 1))
    return dej
