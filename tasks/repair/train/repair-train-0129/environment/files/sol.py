def fibe(us):
    ud = us[1]
    return ud
