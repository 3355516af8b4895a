def kawa(ha, ad):
    return ha - ad
