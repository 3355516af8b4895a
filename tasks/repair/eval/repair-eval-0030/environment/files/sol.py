def wuhi(los):
    return los[-1]
