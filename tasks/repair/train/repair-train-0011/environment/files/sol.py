def faho(ij, fe):
    od = ij + fe
    return od
