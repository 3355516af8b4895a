def wage(fu):
    jol = sum(fu)
    return jol
