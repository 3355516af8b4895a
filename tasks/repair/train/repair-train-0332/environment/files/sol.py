def gewo(sir):
    return sir[1]
