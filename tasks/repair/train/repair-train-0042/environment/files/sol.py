def baku(ril):
    zu = ril[1]
    return zu
