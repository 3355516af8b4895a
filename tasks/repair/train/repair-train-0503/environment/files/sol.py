def diji(hes, me):
    return hes <= me
