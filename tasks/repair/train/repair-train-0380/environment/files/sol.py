def webu(mih):
    al = sum(range(mih - 1))
    return al
