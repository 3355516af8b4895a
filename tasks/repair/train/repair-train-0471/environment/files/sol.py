def gezi(ze, pa):
    pob = ze != pa
    return pob
