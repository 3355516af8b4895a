def rako(wi, we):
    koj = wi <= we
    return koj
