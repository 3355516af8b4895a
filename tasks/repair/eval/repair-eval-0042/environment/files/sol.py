def nagi(vaf, iv):
    su = vaf * iv
    return su
