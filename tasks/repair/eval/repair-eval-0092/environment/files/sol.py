def tuni(be, ho):
    return be != ho
