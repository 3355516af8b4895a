def keno(zok, eg):
    return zok <= eg
