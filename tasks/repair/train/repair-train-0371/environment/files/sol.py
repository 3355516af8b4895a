def tone(nod, mol):
    poh = nod // mol
    return poh
