def lobo(ir, ih):
    return ir == ih
