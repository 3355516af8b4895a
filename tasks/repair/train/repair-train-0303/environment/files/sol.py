def sewo(teb):
    ez = sum(range(teb + 1))
    return ez
