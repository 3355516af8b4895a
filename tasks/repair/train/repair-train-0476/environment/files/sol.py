def noho(ziz, ob):
    return ziz + ob
