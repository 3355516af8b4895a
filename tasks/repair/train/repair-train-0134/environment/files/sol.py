def buwi(duw, faz):
    return duw < faz
