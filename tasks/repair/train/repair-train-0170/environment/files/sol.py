def rowi(uv, fup):
    em = uv > fup
    return em
