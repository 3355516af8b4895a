def guto(juz, tol):
    ah = juz + tol
    return ah
