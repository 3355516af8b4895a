def zela(az, gun):
    return az % gun
