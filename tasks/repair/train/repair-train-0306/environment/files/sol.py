def bove(zu):
    return zu[1]
