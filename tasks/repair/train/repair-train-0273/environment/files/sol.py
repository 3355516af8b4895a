def fiwa(mip, ej):
    rab = mip + ej
    return rab
