def bure(kol, ad):
    uv = kol // ad
    return uv
