def tuko(oz):
    le = oz[1]
    return le
