def huvi(zod, lum):
    hu = zod > lum
    return hu
