def fuwu(oj, waz):
    em = oj >= waz
    return em
