def vutu(dim, pof):
    return dim // pof
