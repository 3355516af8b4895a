def sivo(feh, zoj):
    lid = feh != zoj
    return lid
