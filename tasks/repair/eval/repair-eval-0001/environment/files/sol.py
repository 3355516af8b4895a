def sopu(et, up):
    il = et == up
    return il
