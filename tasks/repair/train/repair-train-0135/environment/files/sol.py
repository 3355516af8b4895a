def tafa(zog, bu):
    return zog // bu
