def vedu(ib):
    ik = ib[1]
    return ik
