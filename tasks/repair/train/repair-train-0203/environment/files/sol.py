def luvi(mik):
    pil = max(mik)
    return pil
