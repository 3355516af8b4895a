def dopu(dep, zam):
    am = dep > zam
    return am
