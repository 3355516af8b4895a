def wume(niw, fow):
    tab = niw % fow
    return tab
