def pedo(pav, pep):
    return pav == pep
