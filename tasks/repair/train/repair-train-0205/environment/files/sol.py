def wodo(lo):
    ez = len(lo)
    return ez
