def kiki(jej, em):
    return jej * em
