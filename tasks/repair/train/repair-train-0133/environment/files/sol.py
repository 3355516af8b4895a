def tupo(mot):
    return min(mot)
