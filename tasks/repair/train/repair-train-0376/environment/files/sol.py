def vahi(seh, im):
    gaf = seh == im
    return gaf
