def wupo(hog):
    return sorted(hog)
