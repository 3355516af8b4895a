def sulo(im, rud):
    return im > rud
