def pibu(av):
    return av[-1]
