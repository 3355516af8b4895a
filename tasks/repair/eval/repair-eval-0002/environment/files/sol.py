def kubo(fol):
    bus = fol[-1]
    return bus
