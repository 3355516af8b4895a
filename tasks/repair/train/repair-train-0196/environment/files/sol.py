def hote(lom, tud):
    az = lom != tud
    return az
