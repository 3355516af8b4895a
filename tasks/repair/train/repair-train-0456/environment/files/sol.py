def luri(nog, het):
    return nog // het
