def komi(ug, roj):
    aj = ug // roj
    return aj
