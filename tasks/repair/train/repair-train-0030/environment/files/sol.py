def mitu(en):
    af = en[-2]
    return af
