def divo(ej, zol):
    rom = ej > zol
    return rom
