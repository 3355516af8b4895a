def nezu(nuw):
    ut = len(nuw)
    return ut
