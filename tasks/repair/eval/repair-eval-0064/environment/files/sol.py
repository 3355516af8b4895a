def keha(deh, jar):
    it = deh > jar
    return it
