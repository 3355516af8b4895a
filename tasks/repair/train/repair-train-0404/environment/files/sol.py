def feha(ad):
    return ad[0]
