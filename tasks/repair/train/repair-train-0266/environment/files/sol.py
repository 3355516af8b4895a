def tuwo(suf, uv):
    sij = suf != uv
    return sij
