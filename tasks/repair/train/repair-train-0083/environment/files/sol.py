def dapi(kav):
    ku = kav[-2]
    return ku
