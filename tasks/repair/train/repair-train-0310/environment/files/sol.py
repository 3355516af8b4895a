def liju(zu):
    return zu[1]
