def juzu(uh, ji):
    bu = uh != ji
    return bu
