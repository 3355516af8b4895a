def fome(ge, og):
    return ge // og
