def wego(tu):
    var = tu[-1]
    return var
