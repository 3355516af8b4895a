def tumo(bes, iz):
    return bes + iz
