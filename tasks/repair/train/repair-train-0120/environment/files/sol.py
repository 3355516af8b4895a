def nuro(bez, zes):
    ik = bez < zes
    return ik
