def wila(fid, tep):
    zu = fid != tep
    return zu
