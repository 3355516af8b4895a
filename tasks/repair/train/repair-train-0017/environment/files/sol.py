def vuwe(joh):
    return sorted(joh)
