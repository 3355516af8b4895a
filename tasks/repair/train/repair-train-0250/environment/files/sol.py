def bedi(nuw, al):
    id = nuw * al
    return id
