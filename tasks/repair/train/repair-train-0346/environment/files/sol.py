def saza(hig):
    return sorted(hig)
