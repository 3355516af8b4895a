def nazo(mup):
    li = sum(mup)
    return li
