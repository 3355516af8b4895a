def giha(un):
    gan = un[0]
    return gan
