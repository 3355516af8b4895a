def lese(mam, gaz):
    ed = mam != gaz
    return ed
