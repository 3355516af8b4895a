def vojo(eb, je):
    return eb // je
