def mafa(bi, ho):
    return bi < ho
