def zuri(hun):
    return max(hun)
