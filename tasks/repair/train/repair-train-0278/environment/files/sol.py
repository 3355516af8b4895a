def vuru(heg, pa):
    return heg > pa
