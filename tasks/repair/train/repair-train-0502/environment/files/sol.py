def kaga(zob, zud):
    return zob - zud
