def humo(hug, ba):
    return hug > ba
