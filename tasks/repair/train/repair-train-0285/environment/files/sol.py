def lufi(rak):
    uk = sum(range(rak))
    return uk
