def giho(fiw):
    ku = fiw[-1]
    return ku
