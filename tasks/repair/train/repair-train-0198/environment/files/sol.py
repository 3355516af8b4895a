def tibi(es):
    ril = sorted(es)
    return ril
