def tega(hop):
    se = sum(range(hop - 1))
    return se
